package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// newLogger makes etcd's logger: its errors and warnings go to log, its info to
// debug. Until loud is set all goes to debug: etcd warns of our configuration
// at every start, and what is wrong then is returned. What etcd holds to be
// fatal is passed to failed and ends the goroutine that said it, in place of
// the process.
func newLogger(log *slog.Logger, loud *atomic.Bool, failed func(error)) *zap.Logger {
	hook := &fatalHook{failed: failed}
	return zap.New(&slogCore{log: log.With("part", "etcd"), loud: loud}, zap.WithFatalHook(hook), zap.WithPanicHook(hook))
}

// slogCore is a zapcore.Core that writes to slog.
type slogCore struct {
	log    *slog.Logger
	loud   *atomic.Bool
	fields []zapcore.Field
}

func (c *slogCore) level(l zapcore.Level) slog.Level {
	switch {
	case !c.loud.Load():
		return slog.LevelDebug
	case l >= zapcore.ErrorLevel:
		return slog.LevelError
	case l == zapcore.WarnLevel:
		return slog.LevelWarn
	}
	return slog.LevelDebug
}

func (c *slogCore) Enabled(l zapcore.Level) bool {
	// zap runs the fatal hook only on entries that a core takes.
	return l > zapcore.ErrorLevel || c.log.Enabled(context.Background(), c.level(l))
}

func (c *slogCore) With(fields []zapcore.Field) zapcore.Core {
	return &slogCore{log: c.log, loud: c.loud, fields: append(c.fields[:len(c.fields):len(c.fields)], fields...)}
}

func (c *slogCore) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

func (c *slogCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	if e.Level > zapcore.ErrorLevel {
		return nil // the hook tells
	}
	m := zapcore.NewMapObjectEncoder()
	for _, f := range append(c.fields[:len(c.fields):len(c.fields)], fields...) {
		f.AddTo(m)
	}
	attrs := make([]slog.Attr, 0, len(m.Fields))
	for k, v := range m.Fields {
		if !whole[k] {
			attrs = append(attrs, slog.Any(k, v))
		}
	}
	c.log.LogAttrs(context.Background(), c.level(e.Level), e.Message, attrs...)
	return nil
}

// whole are fields in which etcd's warning of a slow request has all of it, up
// to a line of maxTxnOps keys.
var whole = map[string]bool{"request": true, "request content": true, "response": true}

func (c *slogCore) Sync() error { return nil }

// fatalHook tells failed of the first fatal entry; those that follow from it
// would only hide the cause.
type fatalHook struct {
	failed func(error)
	once   sync.Once
}

func (h *fatalHook) OnWrite(e *zapcore.CheckedEntry, fields []zapcore.Field) {
	h.once.Do(func() {
		m := zapcore.NewMapObjectEncoder()
		for _, f := range fields {
			f.AddTo(m)
		}
		text := e.Message
		if err, ok := m.Fields["error"]; ok {
			text = fmt.Sprintf("%s: %v", text, err)
		}
		h.failed(errors.New(text))
	})
	runtime.Goexit()
}
