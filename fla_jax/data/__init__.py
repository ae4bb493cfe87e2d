"""Data for pretraining: binidx, JSON Lines and Parquet, text to tokens, documents packed into rows, batches.

data = open_binidx("corpus.idx")
rows = PackedRows(data, 4096, vocab_size=65536)
for batch in batches(rows, range(len(rows)), 32, seed=0):
    batch["tokens"], batch["labels"], batch["segment_ids"], batch["mask"]
"""

from .binidx import BinIdx, BinIdxWriter, open_binidx
from .gather import gather_state
from .packing import PackedRows, batches, pack_documents, split_rows
from .sources import JsonLines, ParquetRows
from .text import tokenize

__all__ = [
    "BinIdx",
    "BinIdxWriter",
    "JsonLines",
    "PackedRows",
    "ParquetRows",
    "batches",
    "gather_state",
    "open_binidx",
    "pack_documents",
    "split_rows",
    "tokenize",
]
