"""The flow `reflect`: rules found over panels of groups, guarded, tried again, brought together."""
