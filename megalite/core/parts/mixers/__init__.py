"""The mixers: every module or package here with a `MIXER` is one, under its own name.

What a package says of itself is read without torch; its layer is in a module beside it.
"""
