"""Compiled code for CPUs: a decode step's products, layers, attention and draws, in C.

It is compiled at its first use, some two seconds, and kept in the user's cache. Where there is no
compiler it is not there, and ops compute by PyTorch.
"""
