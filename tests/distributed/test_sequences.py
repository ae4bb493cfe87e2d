"""The ops on rows whose tokens four devices share: right results, one gather of (M, N) each way, no token
moved.

sequence_run.py does the work.
"""

import functools

import fake_devices


@functools.cache
def report(op, implementation):
    return fake_devices.report("distributed/sequence_run.py", op, implementation)


def test_programs(pair):
    op, implementation = pair
    found = {name: r for name, r in report(op, implementation).items() if name != "errors"}
    wrong = {name: r["error"] for name, r in found.items() if r["error"]}
    assert not wrong, wrong
    B, H, K, V = 1, 2, 4, 3  # rows of one device
    M = 1 if (op, implementation) == ("rwkv6", "triton") else K  # diagonal there
    for name, r in found.items():
        sizes = {kind: [n for k, n in r["collectives"] if k == kind] for kind, _ in r["collectives"]}
        # from four devices: N and M, and in the backward what outputs give to states, and M
        assert sizes.pop("all-gather") == [4 * B * H * K * (M + V)] * 2, (name, r)
        # the gradients of the initial state, of u, and the mean of final states that shard_map's check asks
        # for
        assert all(n in (B * H * K * V, H * K) for n in sizes.pop("all-reduce")), (name, r)
        # the last id of a row's part, forward and backward
        assert all(n == 1 for n in sizes.pop("collective-permute", [])) and not sizes, (name, r)


def test_what_cannot_be():
    no_mesh, unknown, length, packed, chunks, pallas, unnamed = report("rwkv7", "triton")["errors"]
    assert "sequence_axis must be an axis of the mesh in context, got 'sequence'; there is no mesh" in no_mesh
    assert "got 'tokens'; it has ('sequence',)" in unknown
    assert "axis T of r must be a multiple of mesh axis 'sequence' = 8, got T = 20" in length
    assert "cu_seqlens cannot go with tokens over mesh axis 'sequence'; segment_ids can" in packed
    assert "sequences that 8 devices split it takes 128 tokens, or any multiple, got T = 64" in chunks
    assert "'pallas' cannot run this call: it takes whole rows, and T is split over mesh axis" in pallas
    assert "chunk_rwkv7: axis T of an argument [B, T, H, K] is sharded over mesh axis 'sequence'" in unnamed
    assert "sequence_axis='sequence'" in unnamed
