"""What attention knows of positions (`--position`): every module or package here with a `POSITION` is a kind, under its
own name.

What a package says of itself is read without torch; its tables are in a module beside it.
"""
