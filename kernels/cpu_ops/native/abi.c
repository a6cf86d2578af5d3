/* What the loader asks before it calls anything else. Compiled for the plainest CPU of the architecture. */
#include "native.h"

/* Raise together with ABI_VERSION in native_ops.py whenever an exported function changes. */
EXPORT int baton_abi_version(void) { return 1; }

/* What the kernels were compiled for: "avx2" or "portable". */
EXPORT const char *baton_variant(void) {
#if defined(__x86_64__) && !defined(BATON_PORTABLE)
    return "avx2";
#else
    return "portable";
#endif
}

/* The first CPU feature that the kernels need and this machine lacks, or "" when there is none. */
EXPORT const char *baton_missing_feature(void) {
#if defined(__x86_64__) && !defined(BATON_PORTABLE)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2")) return "AVX2";
    if (!__builtin_cpu_supports("fma")) return "FMA";
#endif
    return "";
}
