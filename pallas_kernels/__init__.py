"""Attention kernels for decoding over a long key-value cache.

One folder per op: ``api.py`` is the public function, ``reference.py`` its plain XLA form (the
oracle of every other implementation), and ``triton.py`` / ``mosaic_gpu.py`` / ``mosaic_tpu.py``
the kernels of one backend.

Letters used in shape comments throughout the project:

====  ==========================================================================
B     batch rows
H     query heads
G     key-value heads; query head ``h`` reads key-value head ``h // (H // G)``
D     head dimension
S     slots of a key-value cache (its capacity in tokens)
L     valid tokens of a row, the current one included (``lengths``)
K     budget: tokens a sparse method attends to
C     capacity of the recall cache: remembered (query, support) pairs
R     recalled entries
W     window: most recent tokens that are always candidates
N     candidate slots, ``R * K + W``
T     query tokens of a prefill chunk
E     model width
V     vocabulary
====  ==========================================================================
"""
