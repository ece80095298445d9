def build_info() -> dict[str, str]: ...
def key_ways(
    queries: int,
    keys: int,
    most_keys: int,
    is_causal: bool,
    heads: int,
    kv_heads: int,
    processors: int = 132,
    has_key_bias: bool = True,
) -> tuple[str, str]: ...
