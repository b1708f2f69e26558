"""The commands that a person runs, and what they share.

A command of one file is a file here. A command of several files is a folder whose entry is `command.py`: `doctor`,
`predict`, `study`. No command imports another. ARCHITECTURE.md has the folders that serve several commands.

`recipes` and `studies` hold what is packaged; `module` holds `__main__.py` alone, for `python -m thinwire`.
"""
