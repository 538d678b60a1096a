"""Pure tensor functions, without a model or a request: the specification that the Triton kernels are compared with."""
