"""The operations of recurrent layers as Triton kernels. Twins: `backends.recurrent_ref`."""

from specdec.backends.recurrent_ref import TORCH_RECURRENT

TRITON_RECURRENT = TORCH_RECURRENT
