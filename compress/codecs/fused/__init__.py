"""Work of codecs that a GPU does its own way, in kernels written in Triton; the eager code is what they must equal."""
