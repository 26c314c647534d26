"""GPU kernels in the Triton language, each in a file with its torch reference where there is one to have.

A reference runs anywhere and says what the kernel must compute; a kernel needs a GPU, or Triton's interpreter
(`TRITON_INTERPRET=1`), under which the tests hold it to its reference. Kernels know tensors: neither models nor
requests.
"""
