"""How quantised weights are held, and plain torch of their products. `gpu.weight_formats` chooses."""
