"""The rules of the ``rwkv`` package's PIPELINE in NumPy, float64: what sampling is compared with."""

import numpy as np


def probabilities(logits, temperature, top_p, top_k):
    """PIPELINE.sample_logits, up to the draw."""
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
    out = np.zeros(len(p))
    out[kept] = p[kept] ** (1 / temperature)
    return out / out.sum()


def reference(settings, steps):
    """PIPELINE.generate's bookkeeping: for each (logits, token generated from them) the probabilities."""
    occurrence, out = {}, []
    for logits, token in steps:
        logits = np.array(logits, np.float64)
        logits[list(settings.banned)] = -np.inf
        for seen, count in occurrence.items():
            logits[seen] -= settings.presence_penalty + count * settings.frequency_penalty
        out.append(probabilities(logits, settings.temperature, settings.top_p, settings.top_k))
        occurrence = {seen: count * settings.penalty_decay for seen, count in occurrence.items()}
        occurrence[token] = occurrence.get(token, 0) + (0 if token in settings.uncounted else 1)
    return out
