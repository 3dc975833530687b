"""Who decides which slot serves: lifecycle, dispatch and decisions (pure), coordinator, router, policy, control."""
