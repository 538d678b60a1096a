"""The operations of recurrent layers as Triton kernels. Twins: `backends.recurrent_ref`."""

from specdec.backends.state_pool import RecurrentOps
from specdec.backends.triton.chunks import scan_extend
from specdec.backends.triton.conv import conv_extend, conv_step, conv_tail
from specdec.backends.triton.fold import folder
from specdec.backends.triton.scan import scan_step, scan_tail

TRITON_RECURRENT = RecurrentOps("triton", conv_extend, conv_step, conv_tail, scan_extend, scan_step, scan_tail, folder)
