"""What a plan says where it cannot be made."""


class PlanError(ValueError):
    """A wish that these machines cannot be granted; the message says why and what is nearest."""
