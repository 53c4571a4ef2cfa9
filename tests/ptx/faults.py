"""What is wrong with a kernel or with a launch of it."""


class Fault(Exception):
    """Something that a GPU would not do, or not do the same way each time."""


class Race(Fault):
    """Two accesses of one byte, one of them a write, that nothing puts in an order."""


class UnknownInstruction(Exception):
    """A gap of this folder's, not of the kernel's: the instruction is to be added."""
