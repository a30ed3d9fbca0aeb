"""`phalanx replay`: do a step of a run again from its flight log, and compare.

In: a flight log and the checkpoint before the step. Out: whether its gradients have the same bits again. Start with
`commands`.
"""
