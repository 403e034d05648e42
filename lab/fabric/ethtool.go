package fabric

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// ethtoolValue is the kernel's struct ethtool_value (linux/ethtool.h).
type ethtoolValue struct{ command, data uint32 }

// ifreqData is struct ifreq with its data pointer set.
type ifreqData struct {
	name [unix.IFNAMSIZ]byte
	data unsafe.Pointer
	_    [16]byte
}

func ethtoolSet(fd int, name string, command, value uint32) error {
	v := ethtoolValue{command, value}
	r := ifreqData{data: unsafe.Pointer(&v)}
	copy(r.name[:unix.IFNAMSIZ-1], name)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&r)))
	if errno != 0 {
		return errno
	}
	return nil
}
