"""The program that runs inside a container. It is started with `python -I -S` and imports only the standard library.

launch      the processes: the init process limits the memory and kills leftover processes; the notebook runs the code
isolation   namespaces, root directory, user, capabilities and limits; Landlock if there are no namespaces
seccomp     the filter of system calls
"""
