"""Matrix products: gemv, skinny GEMM, GEMM of 8 bits and cuBLASLt."""
