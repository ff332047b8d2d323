"""The commands of ``python -m flce_ref``, one module each.

A command is two functions: ``add_X(subparsers)`` declares its arguments and ``run_X(args)`` does the work and returns
the exit status; ``flce_ref.__main__`` lists the first of each pair. ``run_X`` imports what it needs itself, so that no
command pays for another's imports.
"""
