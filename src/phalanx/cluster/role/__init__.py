"""The `Role` of this process, read from its launcher's environment.

In: environment variables of Phalanx, torchrun, Fleet, mpirun, srun or a rank table. Out: one `Role`: worker or server,
rank, addresses. Start with `role`.
"""
