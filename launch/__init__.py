"""The commands that a person runs, and what they share.

A command of one file is a file here. A command of several files is a folder whose entry is `command.py`: `bench`,
`predict`, `report`. No command imports another. These folders serve several commands:

    run      what every process of a run executes
    hosts    network namespaces and tc, and the processes in them
    timing   arithmetic of a step's time, without a process group
    shared   arguments, tables, exit codes, links; it knows no command

`recipes` holds the packaged recipes; `module` holds `__main__.py` alone, for `python -m thinwire`.
"""
