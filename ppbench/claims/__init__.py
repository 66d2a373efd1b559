"""Papers' claims about their defenses: data, and rules that set records beside them."""
