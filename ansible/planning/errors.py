"""What a plan says where it cannot be made."""


class PlanError(ValueError):
    """Settings that these machines cannot have; the message says why and what is nearest."""
