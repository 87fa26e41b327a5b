"""What runs inside a container: the standard library only, for it starts as ``python -I -S`` and imports nothing of ours.

launch      the first processes: the init watches the memory and ends what a call leaves behind
isolation   namespaces, root directory, user, capabilities, limits
landlock    which files code may use, where there is no root directory of its own
seccomp     the system calls that are refused
notebook    runs the code, cell by cell
"""
