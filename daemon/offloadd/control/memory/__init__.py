"""Host memory as the control plane owns it: budget, segments, who gets them and who gives way."""
