"""The programs that run isolated: that of a container, and the one that extracts the text of a document.

They import only the standard library. `parse` also imports pypdfium2.

launch      the processes: the init process limits the memory and kills leftover processes; the notebook runs the code
isolation   namespaces, root directory, user, capabilities and limits; Landlock if there are no namespaces
parse       converts one document to text
seccomp     the filter of system calls
"""
