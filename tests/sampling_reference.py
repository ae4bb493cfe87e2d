"""The rules of the ``rwkv`` package's PIPELINE and those beside them in NumPy, float64."""

import numpy as np


def probabilities(logits, temperature, top_p, top_k, min_p):
    """PIPELINE.sample_logits, up to the draw, and min-p."""
    if temperature == 0:
        temperature, top_p = 1.0, 0.0
    p = np.exp(logits - logits.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept, total = [], 0.0
    for token in order:
        kept.append(token)
        total += p[token]
        if total >= top_p and top_p < 1:
            break
    if top_k:
        kept = kept[:top_k]
    kept = [token for token in kept if p[token] >= min_p * p.max()]
    out = np.zeros(len(p))
    out[kept] = p[kept] ** (1 / temperature)
    return out / out.sum()


def reference(settings, steps):
    """PIPELINE.generate's bookkeeping: for each (logits, token generated from them) the probabilities."""
    occurrence, out = {}, []
    for logits, token in steps:
        logits = np.array(logits, np.float64)
        for biased, bias in settings.logit_bias.items():
            logits[biased] += bias
        logits[list(settings.banned)] = -np.inf
        for seen, count in occurrence.items():
            by = settings.repetition_penalty
            logits[seen] = logits[seen] / by if logits[seen] > 0 else logits[seen] * by
            logits[seen] -= settings.presence_penalty + count * settings.frequency_penalty
        rules = settings.temperature, settings.top_p, settings.top_k, settings.min_p
        out.append(probabilities(logits, *rules))
        occurrence = {seen: count * settings.penalty_decay for seen, count in occurrence.items()}
        occurrence[token] = occurrence.get(token, 0) + (0 if token in settings.uncounted else 1)
    return out
