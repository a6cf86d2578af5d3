"""One contract per op; the readable definition and the fast paths.

No __version__ here: transformers would take this folder for another package.
"""

from kernels.contract import Ops
from kernels.select import Selected, select

__all__ = ["Ops", "Selected", "select"]
