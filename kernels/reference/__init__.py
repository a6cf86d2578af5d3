"""The readable definition of every op."""

from kernels.reference.ops import ReferenceOps

__all__ = ["ReferenceOps"]
