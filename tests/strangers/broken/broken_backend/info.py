"""An entry point that does what it must not: it imports what may be missing."""

raise ImportError("libbroken.so.3: cannot open shared object file: No such file or directory")
