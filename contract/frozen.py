"""`dataclass` and `field`. Python 3.6, the oldest that `make help` runs under, lacks them: there,
as much as a table of options needs."""

try:
    from dataclasses import dataclass, field
except ImportError:

    class _Field:
        def __init__(self, default=None, default_factory=None, metadata=None):
            self.default, self.default_factory, self.metadata = default, default_factory, metadata

    field = _Field  # type: ignore

    def dataclass(**_):  # type: ignore
        def with_fields(cls):
            plain = {name: vars(cls).get(name) for name in cls.__annotations__}
            fields = {
                name: value if isinstance(value, _Field) else _Field(value)
                for name, value in plain.items()
            }

            def __init__(self, *values, **words):
                for name, one in fields.items():
                    setattr(
                        self, name, one.default_factory() if one.default_factory else one.default
                    )
                for name, value in {**dict(zip(fields, values)), **words}.items():
                    setattr(self, name, value)

            cls.__dataclass_fields__, cls.__init__ = fields, __init__
            return cls

        return with_fields
