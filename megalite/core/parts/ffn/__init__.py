"""The feed-forward layers: every module or package here with a `FEED_FORWARD` is one, under its `name`.

What a package says of itself is read without torch; its layer is in a module beside it.
"""
