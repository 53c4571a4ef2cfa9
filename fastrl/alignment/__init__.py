"""Aligning a language model from data or from live feedback, with a weight for every sample.

A :class:`DatasLoader` reads examples, a :class:`BatchFactory` makes batches of them for a task (and
of the policy's own responses, which an :class:`Annotator` judges), a :class:`SampleReweighter` sets
the weight of each sample, a :class:`Loss` says what is learned, and a :class:`Trainer` learns it.
"""
