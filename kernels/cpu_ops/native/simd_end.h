/* Closes what simd.h opened. Last line of every file that includes it. */
#ifdef BATON_AVX2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
