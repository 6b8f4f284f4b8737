"""Matrix products: gemv, skinny GEMM, FP8 GEMM and cuBLASLt."""
