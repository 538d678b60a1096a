"""`specdec doctor`: the command of `specdec.doctor`."""

from specdec.doctor.command import doctor_command as command

__all__ = ["command"]
