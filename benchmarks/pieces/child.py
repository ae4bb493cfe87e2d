"""What a process of FLA's pieces does: times of one after another, on torch, or what is compiled before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from running.processes import Job, serve
from running.timing import torch_ms
from running.tuning import compile_only

from pieces import fla_pieces
from pieces.piece import VOCABULARY, piece_of


def draw(wanted: dict[str, tuple[tuple[int, ...], str | None]], dtype: str) -> dict[str, Any]:
    """Inputs; parameters have the tokens' dtype, as in FLA's models. Booleans are not FLA's."""
    import torch

    made = {}
    for name, (shape, kind) in wanted.items():
        if kind == "int32":
            made[name] = torch.randint(0, VOCABULARY, shape, device="cuda")
        elif kind != "bool":
            made[name] = torch.randn(shape, device="cuda").to(getattr(torch, dtype)).requires_grad_()
    return made


def passes_of(job: Job) -> dict[str, Callable[[], None]]:
    """A function that runs each pass of a piece."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    piece, shape = piece_of(job["piece"]), tuple(job["shape"])
    inputs = draw(piece.inputs(shape), job["dtype"])
    assert piece.peer is not None
    call = getattr(fla_pieces, piece.peer)(inputs)
    leaves = [array for array in inputs.values() if array.requires_grad]
    made = call(inputs)
    cotangents = [torch.randn_like(array) for array in made]

    def forward() -> None:
        with torch.no_grad():
            call(inputs)

    def backward() -> None:
        torch.autograd.grad(made, leaves, cotangents, retain_graph=True, allow_unused=True)

    def both() -> None:
        torch.autograd.grad(call(inputs), leaves, cotangents, allow_unused=True)

    passes: dict[str, Callable[[], None]] = {"fwd": forward, "bwd": backward, "fwd+bwd": both}
    return {name: passes[name] for name in piece.moved(shape, 1)}


def milliseconds(job: Job) -> dict[str, float]:
    """Of each pass of a piece."""
    return {name: torch_ms(run) for name, run in passes_of(job).items()}


def once(job: Job) -> None:
    """Each pass of a piece, for what it compiles."""
    for run in passes_of(job).values():
        run()


def make(settings: dict[str, Any]) -> Callable[[Job], Any]:
    if settings["shares"] is None:
        return milliseconds
    compile_only(*settings["shares"])
    return once


if __name__ == "__main__":
    serve(make)
