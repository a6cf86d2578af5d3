"""Builds the native CPU kernels; everything else is in pyproject.toml.

Optional: without a compiler the install goes through and ``kernels.select`` says why it does without them.
"""

import glob
import sys

from setuptools import Extension, setup

NATIVE = "kernels/cpu_ops/native"

# Not a Python module but a plain library beside one, loaded by ctypes (kernels/cpu_ops/native_library.py). AVX2 and FMA are
# switched on inside the sources (simd.h), per file, so that a CPU without them can still load the library and be told so.
native = Extension(
    name="kernels.cpu_ops._native",
    sources=sorted(glob.glob(f"{NATIVE}/*.c")),
    depends=sorted(glob.glob(f"{NATIVE}/*.h")),
    extra_compile_args=["-std=gnu11", "-O3", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off", "-pthread"],
    extra_link_args=["-pthread", "-lm"],
    optional=True,
)

# The pool is written for POSIX threads.
setup(ext_modules=[native] if sys.platform != "win32" else [])
