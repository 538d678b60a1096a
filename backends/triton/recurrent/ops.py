"""The operations of recurrent layers as Triton kernels. Twins: `backends.recurrent.reference`."""

from specdec.backends.recurrent.state_pool import RecurrentOps
from specdec.backends.triton.recurrent.chunks import scan_extend
from specdec.backends.triton.recurrent.conv import conv_extend, conv_step, conv_tail
from specdec.backends.triton.recurrent.fold import folder
from specdec.backends.triton.recurrent.scan import scan_step, scan_tail

TRITON_RECURRENT = RecurrentOps("triton", conv_extend, conv_step, conv_tail, scan_extend, scan_step, scan_tail, folder)
