"""What parts say of their options: every module here has an `OPTIONS`, a `PartOptions`.

Data without torch. Their flags are fields of the configs in core/options.
"""
