"""Wire formats. A dialect translates between the internal form and one wire, both ways."""
