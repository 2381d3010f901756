"""How each component is kept: modes of offloading and the features beside it."""
