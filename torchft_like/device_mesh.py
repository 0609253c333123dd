"""Device meshes with an elastic dimension, under the name that torchft gives their module."""

from torchft_like.process_group.mesh import ManagedDeviceMesh, extend_device_mesh, ft_init_device_mesh

__all__ = ["ManagedDeviceMesh", "extend_device_mesh", "ft_init_device_mesh"]
