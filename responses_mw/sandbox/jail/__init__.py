"""The code inside a container. It starts as `python -I -S` and imports only the standard library.

launch      the processes: the init watches the memory and ends what a call leaves behind; the notebook runs the code
isolation   namespaces, root directory, user, capabilities, limits; Landlock without a root directory
seccomp     the system calls that are refused
"""
