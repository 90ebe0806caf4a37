"""What each Triton kernel computes, in plain torch on any device: what tests hold the kernels to."""
