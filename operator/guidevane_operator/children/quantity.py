"""Kubernetes quantities as numbers."""

from decimal import Decimal

_FACTORS = {
    "": Decimal(1),
    "m": Decimal(1) / 1000,
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "Ki": Decimal(1 << 10),
    "Mi": Decimal(1 << 20),
    "Gi": Decimal(1 << 30),
    "Ti": Decimal(1 << 40),
}


def to_number(quantity: str) -> Decimal:
    """The exact value of a quantity, as in 512Mi or 500m. The API server has checked its form."""
    digits = quantity.rstrip("mkKMGTi")
    return Decimal(digits) * _FACTORS[quantity[len(digits) :]]


def to_bytes(quantity: str) -> int:
    """Bytes of a quantity, as in 512Mi."""
    return int(to_number(quantity))


def to_flag(num_bytes: int) -> str:
    """Bytes as the runtime's flags take them: whole Mi where it fits, else plain."""
    mebibytes, rest = divmod(num_bytes, 1 << 20)
    return str(num_bytes) if rest else f"{mebibytes}Mi"
