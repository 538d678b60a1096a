"""`specdec doctor`: the command of `specdec.tools.doctor`."""

from specdec.tools.doctor.command import doctor_command as command

__all__ = ["command"]
