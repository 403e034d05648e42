package mux

import (
	"fmt"
	"log/slog"
	"os"

	"golang.org/x/sys/unix"
)

// raisePriority makes the threads of this process, and those they start, come
// before others': BFD packets are due every few milliseconds. Without the
// capability it runs as everybody.
func raisePriority(log *slog.Logger) {
	threads, err := os.ReadDir("/proc/self/task")
	for _, t := range threads {
		var id int
		if _, err = fmt.Sscan(t.Name(), &id); err == nil {
			err = unix.Setpriority(unix.PRIO_PROCESS, id, -15)
		}
		if err != nil {
			break
		}
	}
	if err != nil {
		log.Warn("priority not raised: BFD may see a loaded machine as a dead one", "error", err)
	}
}
