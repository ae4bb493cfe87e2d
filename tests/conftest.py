"""Without an NVIDIA GPU, Triton kernels run in Triton's interpreter, which has to be chosen before Triton is
imported.
"""

import os

if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
