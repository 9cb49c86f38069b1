"""The `tokenfleet` command. One module per verb; a verb decides how to ask and to print, never what is right.

A verb module has `add(subparsers)`, which declares its arguments and stays cheap to import, and `run(args) -> int`,
which imports what it needs and returns the exit code: 0 done, 1 the work failed, 2 the command or its input is wrong.
Modules whose names begin with an underscore are not verbs.
"""
